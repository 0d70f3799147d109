"""Runs a whole fleet in one thread on simulated time, and breaks it as a seed says: `python -m tests.simulation`.

The classes are the real ones: coordinators, agents, followers, publishers, generations, routers' choice of replicas,
the wire, guards. What is passed in is simulated: clocks, the event loop with its executor and network, the registry,
files. `fleet` wires processes; `scenario` draws what happens to them; `world` has it happen, and with `history` judges;
`runner` runs seeds and shrinks those that fail.
"""
