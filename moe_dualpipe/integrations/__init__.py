"""Adapters for other libraries, one module per library, named after it.

A module here imports its library only when it is used, so that the library is not a dependency of this package.
"""
