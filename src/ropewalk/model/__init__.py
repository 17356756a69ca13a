"""The mathematics of decoders: configurations, families as rows of data, rotary tables, the NumPy reference."""
