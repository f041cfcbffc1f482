"""Checkpoints: a run that is interrupted anywhere continues as if it had not been.

Promise: `resume.newest` restores what `saver.Saver` has saved bit for bit, on any mesh and any
number of processes. A damaged checkpoint is reported, set aside and never used. The journal
restores the responses that were finished since. Nothing is pickled.

The algorithm imports none of it.
"""
