"""The CUDA engine: rows on several cards, pooled by one kernel that reads its peers' memory.

Owns the kernels (`kernels.cu`), how rows are laid out and placed on cards, how a batch travels to a card, and the shim
over CuPy. Must not know ids, features or scores. Only `cupy_cards.py` imports CuPy; all else takes cards from whoever
made them, so that it runs wherever somebody can launch the kernels.
"""
