"""Faults that are injected into real runs, and a table of the losses.

python -m tests.faults             inject all, print the table
python -m tests.faults NAME ...    only these
python -m tests.faults --list      names
python -m tests.faults --messages  also one message per kind of case

`pytest -m slow tests/faults` injects each fault a few times.
"""
