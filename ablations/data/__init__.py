"""Texts to train on."""
