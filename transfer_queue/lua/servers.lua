-- needs: run
-- Returns for each live server its packed info and the ms that its entry has left. Only reads: those that ask may not
-- write them.
local now = now_ms()
local live = call('ZRANGEBYSCORE', key('servers_until'), '(' .. now, '+inf', 'WITHSCORES')
local told = {}
for i = 1, #live, 2 do
  told[#told + 1] = call('HGET', key('servers'), live[i])
  told[#told + 1] = tonumber(live[i + 1]) - now
end
return told
