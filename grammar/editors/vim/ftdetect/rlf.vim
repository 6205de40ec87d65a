autocmd BufNewFile,BufRead *.rlf setfiletype rlf
