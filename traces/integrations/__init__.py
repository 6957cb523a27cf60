"""Recorder callbacks for training frameworks, one file each; none is imported unless it is used."""
