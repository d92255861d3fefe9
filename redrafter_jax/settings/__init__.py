"""Settings from YAML files and overrides, validated by pydantic."""
