"""What runs on the rented machine: standard library only, Python 3.9 or newer, alone.

The whole folder is copied to the machine and nothing outside it is imported, so that a session can be
ended there with no package index, no network and no laptop.
"""
