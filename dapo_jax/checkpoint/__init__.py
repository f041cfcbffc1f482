"""Checkpoints: a run that is interrupted anywhere continues as if it had not been.

Promise: `resume.newest` restores what `saver.Saver` has saved bit for bit, on any mesh and any
number of processes. A damaged checkpoint is reported, set aside and never used. The journal
restores the responses that were finished since. Nothing is pickled.

Used from outside: `saver.Saver`, `resume.newest`, `checkpoint.restore_params`, `workdir.hold`,
`journal.Journal`.
Modules: checkpoint (Orbax), seal (checksums), saver (saving in the background), resume (which step,
and which changes are allowed), export (Hugging Face directories during a run), branch (from another
run's step, or an earlier one), journal and remembered (responses of the running step), workdir
(locks, buckets), retry (retries of reads). The algorithm imports none of it.
"""
