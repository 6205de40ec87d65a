"""Imported before all else where worlds are forked from: no garbage is collected while libraries are imported, which
would find none and takes a quarter of their time. `tests.warm` ends it."""

import gc

gc.disable()
