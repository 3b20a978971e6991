import socket
import sys

number = int(sys.argv[1])
server = socket.create_server(("127.0.0.1", 7000))
while True:
    connection, _ = server.accept()
    connection.sendall(str(number).encode())
    connection.close()
    number += 1
