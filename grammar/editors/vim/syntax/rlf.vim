" RLHF and LLM-RL programs (.rlf). Words are keywords only where the grammar expects them.
if exists("b:current_syntax")
  finish
endif

syntax match rlfComment /#.*$/ contains=@Spell
syntax region rlfString start=/"/ skip=/\\./ end=/"/ oneline contains=rlfEscape
syntax match rlfEscape /\\./ contained

syntax match rlfName /\<\h\w*\>/
syntax match rlfOption /\<\h\w*\ze\s*=[^=]/
syntax match rlfNumber /\<\d[0-9_]*\(\.[0-9_]\+\)\?\([eE][+-]\?\d\+\)\?[kM]\?\>/ nextgroup=rlfUnit skipwhite
syntax keyword rlfUnit contained prompts sequences pairs tokens
syntax match rlfBoolean /\<\(true\|false\)\>/

syntax match rlfFunction /\<\h\w*\ze\s*(/
syntax match rlfBuiltin /\<\(exp\|log\|expm1\|log1p\|sqrt\|abs\|sigmoid\|logsigmoid\|min\|max\|clip\|where\|stop_gradient\|sum\|mean\|count\|std\|var\|logsumexp\|median\|quantile\|sort\|rank\|across\|len\|next\|prev\|cumsum\|discount\|last\|at_end\|over\|along\|prefixes\|pick\|whole\|others\|pair\|concat\|uniform\|step_number\|choice\)\ze\s*(/
syntax match rlfSource /\<\(causal_lm\|value_model\|reward_model\|jsonl\|parquet\|hf\|adamw\|lora\|mesh\)\ze\s*(/
syntax match rlfMember /\.\s*\h\w*/
syntax match rlfCall /\.\s*\(generate\|logprobs\|entropy\|values\|score\|train\|next\)\ze\s*(/

syntax match rlfOperator /\*\*\|->\|<=\|>=\|==\|!=\|[-+*\/<>=]/
syntax match rlfWord /\<\(and\|or\|not\)\>/
syntax match rlfWord /\<by\>\ze\s\+\(batch\|prompt\|seq\|turn\|token\|entry\)\>/ nextgroup=rlfLevel skipwhite
syntax match rlfLevel /\<\(batch\|prompt\|seq\|turn\|token\|entry\)\>/ contained
syntax match rlfLevel /\(:\s*\|->\s*(\?\)\@<=\<\(batch\|prompt\|seq\|turn\|token\|entry\|any\)\>/

syntax match rlfKeyword /\([A-Za-z0-9_)"*\]]\s\+\)\@<=on\>\ze\s\+\h/
syntax match rlfKeyword /\()\s\+\)\@<=train\>\ze\s\+\h/
syntax match rlfKeyword /\<\(when\|until\|from\)\>\ze\s*[^=(.,) \t]/
syntax match rlfKeyword /\([A-Za-z0-9_)"\]]\s\+\)\@<=\(where\|with\|max\|to\|every\)\>\ze\s\+[^(.=,) \t]/
syntax match rlfKeyword /\(:\s*\)\@<=env\>/
syntax match rlfKeyword /\(^\s*place\s\+\S\+\s\+\)\@<=auto\>/
syntax match rlfKeyword /\(^\|{\)\s*\zs\(metric\|return\|save\|every\|repeat\|eval\|stop\|sync\|ema\|checkpoint\)\>\ze\(\s\+[^=,]\|\s*$\|\s*[{(]\)/
syntax match rlfKeyword /\(^\|{\)\s*\zs\(first\|after\)\>\ze[ \t]\+\w/
syntax match rlfKeyword /\(\(^\|{\)\s*metric\s\+\)\@<=\(hist\|table\)\>\ze[ \t]\+\h/
syntax match rlfKeyword /^\s*\zsplace\>/
syntax match rlfInclude /^\s*\zsuse\>\(\s\+py\>\)\?/
syntax match rlfDeclaration /\(^\s*state\s\+\h\w*\s\+\)\@<=of\>/
syntax match rlfDeclaration /^\s*\zs\(param\|state\|buffer\|cluster\|mesh\|data\|model\|fn\|loss\|flow\)\>\ze\s\+[A-Za-z_"]/

highlight default link rlfComment Comment
highlight default link rlfString String
highlight default link rlfEscape SpecialChar
highlight default link rlfNumber Number
highlight default link rlfUnit Type
highlight default link rlfBoolean Boolean
highlight default link rlfBuiltin Function
highlight default link rlfFunction Function
highlight default link rlfCall Function
highlight default link rlfSource Structure
highlight default link rlfOption Identifier
highlight default link rlfOperator Operator
highlight default link rlfWord Operator
highlight default link rlfLevel Type
highlight default link rlfKeyword Statement
highlight default link rlfInclude Include
highlight default link rlfDeclaration Structure

let b:current_syntax = "rlf"
