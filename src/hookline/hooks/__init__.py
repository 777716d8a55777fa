"""How a function reaches a value: modules, gradients, parameters; calls, visits and handles.

Knows nothing of captures or edits: those are built on what is here.
"""
