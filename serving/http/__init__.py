"""The HTTP API: FastAPI on uvicorn, with the limits and timeouts that uvicorn itself does not have."""
