"""What a run is asked for: sections, kinds, presets, TOML."""
