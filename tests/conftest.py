"""Settings that every test shares."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# One profile for everyone: deadlines would time the machine, not the code.
settings.register_profile("gradreel", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.load_profile("gradreel")

# Errors are compared as plain text; 80 columns is what a user's terminal has at least.
os.environ.setdefault("NO_COLOR", "1")
os.environ.setdefault("COLUMNS", "80")
