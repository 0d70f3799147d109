"""Reports: a load test's result as one HTML file that a person can read.

Owns the page, its plots and tables, and the form of a comparison between several results. Must not know how a load is
made or sent: it reads results (`loadtest.load.result`) and measures nothing. A page needs no network, no script and no
font: it may be mailed, kept with a commit and opened years later.
"""
