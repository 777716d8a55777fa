"""Say what is in a model before anything is captured or changed.

    listing.py     `hl.sites`: the sites a pattern names, with shapes when given an example
    annotating.py  `hl.source`: a forward's source, with the address of each value beside it
    labels.py      which names there are on a line, and with which numbers
    tracing.py     what ran inside a forward with an example
    predicting.py  which operations the source tells of
    inferring.py   what an expression in a forward is
    calling.py     the functions that a forward calls and that can be entered
    naming.py      what a function is called, and its file
    pages.py       a source with labels in the margin, as text, in notebooks, through rich
    examples.py    one forward with an example
    preserving.py  run a forward and put the model and the random state back

Keeps no tensors.
"""
