"""Graph passes that put one op in place of several, and the library of those ops."""
