"""`python -m serving.cli`: how a supervisor starts its children with its own interpreter."""

from serving.cli import main

if __name__ == "__main__":
    main(prog_name="shardrank")
