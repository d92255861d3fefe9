"""The decode step and prefill: functions of arrays."""
