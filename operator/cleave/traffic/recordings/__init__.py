"""Files of recorded requests: their formats, fields, units and failures, for `traffic.history`."""
