"""Ranking where rows lie on cards: ids go up once, scores come down once, and all between stays on one card."""
