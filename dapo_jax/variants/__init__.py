"""Methods beyond DAPO: each file replaces a part of `algorithm.Algorithm`."""
