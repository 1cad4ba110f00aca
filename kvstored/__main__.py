from kvstored.cli.main import main

main()
