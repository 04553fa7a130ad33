"""Sphinx's settings. Everything that a page needs comes from the site itself: no fonts, no scripts of other hosts."""

project = "posttrain"
author = "the posttrain authors"
html_title = "posttrain"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
nitpicky = True
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]

myst_heading_anchors = 6
myst_links_external_new_tab = False

html_theme = "furo"
html_theme_options = {"top_of_page_buttons": [], "navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_last_updated_fmt = None
pygments_style = "friendly"
pygments_dark_style = "monokai"
