"""What each way to make tables smaller costs in quality and saves in bytes, measured on real and on made-up data.

`python -m loadtest.levers movielens` trains a model of MovieLens with each of them, and with all in the proposed order;
`python -m loadtest.levers hash-sizes` makes hashed tables smaller and smaller. Both write JSON and a picture beside it.
"""
