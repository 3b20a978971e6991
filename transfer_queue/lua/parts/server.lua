-- This start of this server, as a number: another one after a restart, and on a replica that takes over.
local function server_start()
  return tonumber(string.sub(string.match(redis.call('INFO', 'server'), 'run_id:(%x+)'), 1, 12), 16)
end
