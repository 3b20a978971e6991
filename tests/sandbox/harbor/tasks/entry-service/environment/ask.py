import socket

with socket.create_connection(("127.0.0.1", 7000), 10) as connection:
    print(connection.recv(20).decode())
