"""Arrays on one device: the array module of an array, devices, threads, memory. Import the module you need."""
