"""Pages on this machine: pictures as data, HTML, and a small server that only this machine reaches.

Read in this order: `picture` (the few kinds of pictures, as data), `html` (escaped HTML and Markdown), `guard` (who may
ask: token, Host, Origin, and the policy that a browser holds the page to), `local` (the server). The front end is
`static/`: one script that draws pictures, one style sheet, and uPlot for curves. The lab stands on it.
"""
