"""Two runs, one answer: the first place where they differ. Knows no models.

What is compared:

traces.py        sites in the order of execution, and their numbers
reading.py       a run folder as a trace
rank_merging.py  the ranks of a run as one trace
ranking.py       two run folders, rank by rank or all ranks together

Which sites belong together:

aligning.py      the rules, one after the other
matches.py       what they say
outlines.py      a trace as they look things up in it
naming.py        by name; numbering.py where the children of a list have moved
partners.py      the sites of two modules that are one
ordering.py      by the order of execution; scoring.py how alike two values are, sequences.py the
                 best match in order, fingerprints.py weights in a few numbers, kinds.py of modules
enclosing.py     the modules around values that were matched
joining.py       what is one tensor here and several there
owning.py        parameters and buffers
following.py     gradients and updates
relating.py      whether there is enough that fits

The verdict:

comparing.py     all of it, step by step
phases.py        the pairs in the order of judging
measuring.py     how far two tensors are apart; gaps.py for every pair
tolerances.py    how far they may be: every constant
noise.py         what differs without meaning
drifting.py      trainings that part slowly
judging.py       which pair differs first, and what it comes from
tracing_back.py  what a value was made of, and whose code made it; blaming.py of gradients
factors.py       what is off everywhere
causes.py        what is set otherwise
concluding.py    from there to the result
difference.py    the result
wording.py       its sentence; writing.py the numbers in it
"""
