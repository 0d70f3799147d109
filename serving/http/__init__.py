"""The HTTP API: FastAPI on uvicorn, with the limits and timeouts that uvicorn itself does not have.

Rank, lookup and infer requests are answered by the connection itself. Handlers know neither FastAPI nor uvicorn: they
turn an `Exchange` into a `Reply`.
"""
