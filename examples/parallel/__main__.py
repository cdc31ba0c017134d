from parallel.ranks import main

if __name__ == "__main__":
    main()
