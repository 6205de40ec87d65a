"""The files of a model directory that say how its images become numbers."""

# the second has the first inside it, in newer directories
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
