"""Read the data of users: files, folders, functions and published data sets, each as content of a data set."""
