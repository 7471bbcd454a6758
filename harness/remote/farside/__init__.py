"""The program that runs on a remote host, sent along with each connection: Python >= 3.10, standard library.

Nothing here may import anything outside this package; ``harness.remote.link`` sends its modules as they stand.
"""
