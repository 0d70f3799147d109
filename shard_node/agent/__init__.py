"""The agent: stages, follows and retires versions until a process is what the registry wants of it."""
