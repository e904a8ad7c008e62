import worker

worker.main()
