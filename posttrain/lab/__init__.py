"""The lab: one page an idea, computed by the library's own code.

`lesson` says what a page is made of; each page is one file below `lessons/`, in the folder of its part. `catalog` finds
them without importing them, so the map is there at once. `page` writes a page, `overview` the map; `server` serves
them, `cut_work` runs what trains in a process of its own that can be cut (`preload` is what it imports first), `site`
writes them all as files.

To add a page, write one file: copy the nearest lesson, change its `LESSON`. No lesson has mathematics of its own: what
computes is in the library, or in `posttrain.toy`.
"""
