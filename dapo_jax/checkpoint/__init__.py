"""Closed wing: a run that is cut anywhere goes on as if nothing had happened.

Promise: what `saver.Saver` has saved, `resume.newest` gives back bit for bit, on any mesh and any
number of processes; what was damaged since is named, set aside and never used. Finished
responses of the steps since then, `remembered.Responses` reads back. Nothing is pickled.

Doors: `saver.Saver`, `resume.newest`, `checkpoint.restore_params`, `workdir.hold`,
`journal.Journal`.
Inside: checkpoint (Orbax), seal (is it what was written?), saver (in the background), resume (from
which step, and what may have changed), export (Hugging Face directories meanwhile), branch (from
another run's step, or further back), journal (records of the running step), remembered (responses
and grades in them), workdir (locks, buckets), patience (what cannot be read is tried again). The
algorithm imports none of it.
"""
