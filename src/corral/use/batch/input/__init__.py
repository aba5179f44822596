"""From input files to checked rows: formats, recipes, parameters, lengths."""
