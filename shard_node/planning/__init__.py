"""Placement of rows before anything is loaded: hotness, budgets of cards, and what a batch then costs. Pure."""
