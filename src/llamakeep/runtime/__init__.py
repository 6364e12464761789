"""Runtimes: what evaluates tokens and hands out their state as bytes."""
