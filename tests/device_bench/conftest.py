from hypothesis import settings

# A shared machine stalls now and then; a slow example is no failure.
settings.register_profile("device_bench", deadline=None, max_examples=60)
settings.load_profile("device_bench")
