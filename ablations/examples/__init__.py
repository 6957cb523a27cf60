"""Short scripts that train and record with each framework; the tests run every one of them.

python -m ablations.examples.plain_loop
"""
