"""Say what is in a model before anything is captured or changed.

    listing.py     `hl.sites`: the sites a pattern names, with shapes when given an example
    preserving.py  run a forward and put the model and the random state back

Keeps no tensors.
"""
