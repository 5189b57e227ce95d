"""The measured system: brokers and coordinators as processes, their figures, and logs that are filled in advance."""
