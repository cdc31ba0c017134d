"""Other libraries' interfaces over mmrender's: one module a library, which translates and decides nothing.

Nothing is imported here: each module needs the library that it is named after.
"""
