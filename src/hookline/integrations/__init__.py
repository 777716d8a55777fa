"""Other people's tools, each in a file of its own that is imported by name.

    tensorboard.py   the steps of a watch as scalars in TensorBoard

Nothing here comes with `import hookline`, and each package is imported only when it is used.
"""
