"""The formats of requests and answers: pure functions between bytes and arrays.

Owns what a request must look like (`schema`), its JSON, protobuf and Open Inference Protocol forms, and every count
that is checked before something is made of it. Must not know a served model, a lease, a clock or a connection.
"""
