"""The result of planning as one self-contained HTML page."""
