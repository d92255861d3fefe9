"""One decode step and all it needs: functions of arrays."""
